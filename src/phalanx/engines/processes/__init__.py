"""Worker processes over one arena: the driver, the pool of workers, and what starts them."""
