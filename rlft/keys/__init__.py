"""Keys: their bounds and choices, which one a wrong name meant, and how a class is made from them."""
