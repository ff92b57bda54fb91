"""What a person looks at: tables, figures, loggers."""
