"""Sites that dial out: workers at other places, which reach the server by ordinary HTTPS requests of their own."""
