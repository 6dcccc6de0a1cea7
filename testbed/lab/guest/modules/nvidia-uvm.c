// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in for NVIDIA's unified memory module: two device nodes on a major that the kernel chooses at load, so that
 * it moves with what was loaded before, as the real one's does; or on the one that the parameter asks for.
 */
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>

static int major;
module_param(major, int, 0444);
static struct class *class;
static const struct file_operations operations = { .owner = THIS_MODULE };

static char *node(struct device *device, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static int __init start(void)
{
	int got = register_chrdev(major, "nvidia-uvm", &operations);

	if (got < 0)
		return got;
	major = major ?: got;
	class = class_create(THIS_MODULE, "nvidia-uvm");
	if (IS_ERR(class)) {
		unregister_chrdev(major, "nvidia-uvm");
		return PTR_ERR(class);
	}
	class->devnode = node;
	device_create(class, NULL, MKDEV(major, 0), NULL, "nvidia-uvm");
	device_create(class, NULL, MKDEV(major, 1), NULL, "nvidia-uvm-tools");
	return 0;
}

static void __exit stop(void)
{
	device_destroy(class, MKDEV(major, 1));
	device_destroy(class, MKDEV(major, 0));
	class_destroy(class);
	unregister_chrdev(major, "nvidia-uvm");
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_SOFTDEP("pre: nvidia");
MODULE_DESCRIPTION("stand-in for NVIDIA's unified memory module, for tests");
