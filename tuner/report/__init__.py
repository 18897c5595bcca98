"""Reports of measurements: a page, an explanation, a comparison. This package only reads."""
