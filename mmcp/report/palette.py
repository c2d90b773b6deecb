"""Colours that people who do not see red and green apart can tell from each other, on light and on dark."""

# Okabe and Ito, https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, PINK, SKY, VERMILION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
GREY = "#8A8A8A"

MODALITY = {"text": PINK, "image": GREEN, "video": BLUE, "audio": ORANGE}
PATTERN = {"text": "", "image": "x", "video": "", "audio": "/"}
"""Hatching beside the colour, in plotly's letters."""
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION)
SCALE = "Cividis"  # plotly's name of a scale from blue to yellow, even in lightness
