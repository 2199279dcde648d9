"""How machines differ: factors of the parts of a step, and what measured iterations say of them."""
