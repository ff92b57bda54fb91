"""Layers of many small models in one launch: convolutions, pooling, normalisation, attention; and their samples."""
