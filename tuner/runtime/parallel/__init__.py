"""Programs of several ranks: decisions that all share, and sequences split over them."""
