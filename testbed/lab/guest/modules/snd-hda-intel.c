// SPDX-License-Identifier: GPL-2.0
/* Stand-in for the driver of a card's audio function, for which QEMU's pvpanic-pci stands. It binds and that is all. */
#include <linux/module.h>
#include <linux/pci.h>

static int audio_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return pcim_enable_device(pdev);
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(0x1b36, 0x0011) }, { } };
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver audio = { .name = "snd_hda_intel", .id_table = ids, .probe = audio_probe };
module_pci_driver(audio);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("stand-in for the driver of a card's audio function, for tests");
