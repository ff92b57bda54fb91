"""Layers of many small models in one launch: convolutions, pooling, normalisation; and their samples."""
