"""Gates and monitors of the control recipes, with the independent formulas that they compare a loss with."""
