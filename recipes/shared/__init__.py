"""What recipes of several domains use: data sets, teachers, models and data sets of the hub."""
