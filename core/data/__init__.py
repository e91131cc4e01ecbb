"""Reading data: sample order and read-ahead, inventory and overlap of splits, downloads by hash, images of samples."""
