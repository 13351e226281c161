"""Take requests in, hand tokens out, and record each request once."""
