"""Who is here: the vocabulary at the bottom of the house, and (from the second machine on) how peers are found."""
