"""The fold over arrivals, the same for every fleet: loop, trace, evaluation, delays, results."""
