// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in for NVIDIA's kernel module: everything a host sees of a GPU but the GPU.
 *
 * Binds QEMU's bochs-display, gives each card the lowest free minor, and counts who has it open. Taking a card away
 * while it is open waits in the kernel until the last close, as NVIDIA's nv_pci_remove does.
 *
 * Parameters, written while it runs: refuse=ADDRESS fails the card's probe, leak=ADDRESS keeps its usage count above
 * zero. caps_major, like nvidia-uvm's major, is 0 for one that the kernel chooses. A number written to /dev/nvidiaN becomes the utilisation that the stand-in nvidia-smi shows.
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/wait.h>

#define MAJOR_NUMBER 195 /* Documentation/admin-guide/devices.txt */
#define CONTROL_MINOR 255
#define MOST_GPUS 32
#define CAPS 2

static char *refuse = "";
module_param(refuse, charp, 0644);
static char *leak = "";
module_param(leak, charp, 0644);
static char *model = "NVIDIA RTX PRO 6000 Blackwell Server Edition";
module_param(model, charp, 0444);
static int caps_major;
module_param(caps_major, int, 0444);

struct gpu {
	struct pci_dev *pdev;
	struct proc_dir_entry *folder;
	wait_queue_head_t last_close;
	unsigned int minor, users, load;
	bool leaving;
};

static DEFINE_MUTEX(table_lock);
static struct gpu *table[MOST_GPUS];
static struct class *class;
static struct cdev gpu_cdev, caps_cdev;
static dev_t caps_base;
static struct proc_dir_entry *proc_root, *proc_gpus;

static bool named(const char *parameter, struct pci_dev *pdev)
{
	return parameter && strstr(parameter, pci_name(pdev));
}

static int gpu_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct gpu *gpu;
	int error = 0;

	if (minor == CONTROL_MINOR)
		return 0;
	mutex_lock(&table_lock);
	gpu = minor < MOST_GPUS ? table[minor] : NULL;
	if (gpu && !gpu->leaving) {
		gpu->users++;
		file->private_data = gpu;
	} else {
		error = -ENODEV;
	}
	mutex_unlock(&table_lock);
	return error;
}

static int gpu_release(struct inode *inode, struct file *file)
{
	struct gpu *gpu = file->private_data;

	if (!gpu)
		return 0;
	mutex_lock(&table_lock);
	if (!--gpu->users)
		gpu->load = 0;
	wake_up(&gpu->last_close);
	mutex_unlock(&table_lock);
	return 0;
}

static ssize_t gpu_write(struct file *file, const char __user *text, size_t size, loff_t *offset)
{
	struct gpu *gpu = file->private_data;
	int error = gpu ? kstrtouint_from_user(text, size, 10, &gpu->load) : -EINVAL;

	return error ? error : size;
}

static const struct file_operations gpu_operations = {
	.owner = THIS_MODULE, .open = gpu_open, .release = gpu_release, .write = gpu_write,
};
static const struct file_operations caps_operations = { .owner = THIS_MODULE };

static int information_show(struct seq_file *file, void *unused)
{
	struct gpu *gpu = file->private;
	unsigned int id = pci_dev_id(gpu->pdev);

	seq_printf(file, "Model: \t\t %s\n", model);
	seq_printf(file, "IRQ:   \t\t %d\n", gpu->pdev->irq);
	seq_printf(file, "GPU UUID: \t GPU-%08x-1ab0-4c0d-8000-%012x\n", id, id);
	seq_puts(file, "Bus Type: \t PCIe\n");
	seq_printf(file, "Bus Location: \t %s\n", pci_name(gpu->pdev));
	seq_printf(file, "Device Minor: \t %u\n", gpu->minor);
	seq_puts(file, "GPU Excluded:\t No\n");
	return 0;
}

static int load_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "%u\n", ((struct gpu *)file->private)->load);
	return 0;
}

static int version_show(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build (stand-in)\n");
	return 0;
}

static int gpu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct gpu *gpu;
	int error;

	if (named(refuse, pdev))
		return -EIO;
	error = pcim_enable_device(pdev);
	if (error)
		return error;
	gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	if (!gpu)
		return -ENOMEM;
	gpu->pdev = pdev;
	init_waitqueue_head(&gpu->last_close);
	mutex_lock(&table_lock);
	while (gpu->minor < MOST_GPUS && table[gpu->minor])
		gpu->minor++;
	if (gpu->minor < MOST_GPUS)
		table[gpu->minor] = gpu;
	mutex_unlock(&table_lock);
	if (gpu->minor == MOST_GPUS) {
		kfree(gpu);
		return -EBUSY;
	}
	pci_set_drvdata(pdev, gpu);
	gpu->folder = proc_mkdir(pci_name(pdev), proc_gpus);
	proc_create_single_data("information", 0444, gpu->folder, information_show, gpu);
	proc_create_single_data("load", 0444, gpu->folder, load_show, gpu);
	device_create(class, NULL, MKDEV(MAJOR_NUMBER, gpu->minor), NULL, "nvidia%u", gpu->minor);
	return 0;
}

static bool may_go(struct gpu *gpu)
{
	bool free;

	mutex_lock(&table_lock);
	free = !gpu->users && !named(leak, gpu->pdev);
	mutex_unlock(&table_lock);
	return free;
}

static void gpu_remove(struct pci_dev *pdev)
{
	struct gpu *gpu = pci_get_drvdata(pdev);

	mutex_lock(&table_lock);
	gpu->leaving = true;
	mutex_unlock(&table_lock);
	if (!may_go(gpu)) {
		pr_err("NVRM: Attempting to remove device %s with non-zero usage count!\n", pci_name(pdev));
		/* In D state. The timeout is for `leak`, whose change wakes nobody. */
		while (!wait_event_timeout(gpu->last_close, may_go(gpu), HZ / 5))
			;
	}
	device_destroy(class, MKDEV(MAJOR_NUMBER, gpu->minor));
	proc_remove(gpu->folder);
	mutex_lock(&table_lock);
	table[gpu->minor] = NULL;
	mutex_unlock(&table_lock);
	kfree(gpu);
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(0x1234, 0x1111) }, /* bochs-display: QEMU can't be told another device's ids */
	{ }
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = gpu_probe, .remove = gpu_remove };

static char *node(struct device *device, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static int __init start(void)
{
	int cap, error = register_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1, "nvidia");

	if (error)
		return error;
	caps_base = MKDEV(caps_major, 0);
	error = caps_major ? register_chrdev_region(caps_base, CAPS + 1, "nvidia-caps")
			   : alloc_chrdev_region(&caps_base, 0, CAPS + 1, "nvidia-caps");
	if (error)
		goto no_caps;
	class = class_create(THIS_MODULE, "nvidia");
	if (IS_ERR(class)) {
		error = PTR_ERR(class);
		goto no_class;
	}
	class->devnode = node;
	cdev_init(&gpu_cdev, &gpu_operations);
	cdev_init(&caps_cdev, &caps_operations);
	error = cdev_add(&gpu_cdev, MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
	if (error)
		goto no_gpu_cdev;
	error = cdev_add(&caps_cdev, caps_base, CAPS + 1);
	if (error)
		goto no_caps_cdev;
	proc_root = proc_mkdir("driver/nvidia", NULL);
	proc_gpus = proc_mkdir("gpus", proc_root);
	proc_create_single("version", 0444, proc_root, version_show);
	device_create(class, NULL, MKDEV(MAJOR_NUMBER, CONTROL_MINOR), NULL, "nvidiactl");
	for (cap = 1; cap <= CAPS; cap++)
		device_create(class, NULL, caps_base + cap, NULL, "nvidia-caps!nvidia-cap%d", cap);
	error = pci_register_driver(&driver);
	if (!error)
		return 0;
	for (cap = 1; cap <= CAPS; cap++)
		device_destroy(class, caps_base + cap);
	device_destroy(class, MKDEV(MAJOR_NUMBER, CONTROL_MINOR));
	proc_remove(proc_root);
	cdev_del(&caps_cdev);
no_caps_cdev:
	cdev_del(&gpu_cdev);
no_gpu_cdev:
	class_destroy(class);
no_class:
	unregister_chrdev_region(caps_base, CAPS + 1);
no_caps:
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
	return error;
}

static void __exit stop(void)
{
	int cap;

	pci_unregister_driver(&driver);
	for (cap = 1; cap <= CAPS; cap++)
		device_destroy(class, caps_base + cap);
	device_destroy(class, MKDEV(MAJOR_NUMBER, CONTROL_MINOR));
	proc_remove(proc_root);
	cdev_del(&caps_cdev);
	cdev_del(&gpu_cdev);
	class_destroy(class);
	unregister_chrdev_region(caps_base, CAPS + 1);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("stand-in for NVIDIA's kernel module, for tests");
