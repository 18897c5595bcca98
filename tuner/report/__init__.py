"""Measurements as a page, as words and as a comparison. Reads; decides nothing."""
