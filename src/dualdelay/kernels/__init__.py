"""Convolutions and pooling of many small models in one launch."""
