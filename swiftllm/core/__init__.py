"""The vocabulary of all packages: requests, their sampling parameters, and the plan of an iteration."""
