"""Attention: plain, packed, paged, sparse, quantised, and the operators of compiled graphs."""
