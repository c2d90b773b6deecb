"""The composition root: the jobs of the command line as plain Python, for people who edit them."""
