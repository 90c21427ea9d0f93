"""What the library tells about itself while it works. Sinks live in their own modules."""
