"""Parts used by recipes of several domains: data sets, teachers, models and data sets of the hub."""
