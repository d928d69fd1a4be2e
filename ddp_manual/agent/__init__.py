"""The agent of a rank: it joins the run, watches its worker, and says why the run ends. Nothing here imports torch."""
