"""Templates of word problems: one function each, from choices to a story with its working."""
