"""Workers that each have a device: gradients go from device to device, and every worker updates everything."""
