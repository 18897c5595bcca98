"""Matrix products: plain, scaled, gated, grouped, and those of a layer of experts."""
