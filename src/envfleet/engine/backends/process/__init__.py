"""Workers as processes: started, woken, watched and ended."""
