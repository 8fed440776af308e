"""The same machines over a simulated log, bus, clock, provider and disks."""
