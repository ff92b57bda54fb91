"""Layers of many small models at once: convolutions, pooling, normalisation, attention, recurrence; and their samples."""
