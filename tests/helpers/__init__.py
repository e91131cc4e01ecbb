"""What tests share: the real commands, small data sets and models, the record of `make verify`."""
