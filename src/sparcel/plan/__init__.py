"""Will it help: what a step of training takes with every method, on a cluster as it is."""
