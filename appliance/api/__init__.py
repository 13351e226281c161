"""What clients say and read: routes, fields, replies."""
