"""Many runs at once: those that share a schedule advance as rows of one fold."""
