"""Reading data: sample order and read-ahead, inventory and overlap of splits, assets by hash, pictures of samples."""
