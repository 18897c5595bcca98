"""Gradients of attention and of linear layers."""
