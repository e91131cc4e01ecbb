"""Measurements on data: samples, their order and their splits, pictures, texts, tables and series."""
