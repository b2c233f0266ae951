"""Worker processes over one arena: the driver, the pool of workers, their starter, and recovery."""
