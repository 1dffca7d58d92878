"""Unfinished engines for readers to finish; not stages, and found by nothing."""
