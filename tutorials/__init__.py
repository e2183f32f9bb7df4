"""Tutorials: scripts in cells, and what turns them into pages and notebooks."""
