// Puts the first host bridge, and so the GPU at 01:00.0, on NUMA node 0: QEMU says a node only for the other bridges.
DefinitionBlock ("", "SSDT", 2, "LAB", "NUMA", 1)
{
    External (\_SB.PCI0, DeviceObj)
    Scope (\_SB.PCI0) { Name (_PXM, Zero) }
}
