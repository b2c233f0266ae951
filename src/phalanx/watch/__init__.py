"""What people look at: a progress bar and pictures. Each library is imported where it is used."""
