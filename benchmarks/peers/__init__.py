"""Gradients of the same implicit layers by torchdil and by other libraries, each in a process of its own."""
