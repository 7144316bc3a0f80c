//! Charts as SVG: columns over the checkpoints, and the job's life as a line.

use maud::{html, Markup};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 160.0;
/// Room for the numbers of an axis.
const LEFT: f64 = 90.0;
const BOTTOM: f64 = 20.0;

/// One column: what it stands for, what is said of it, and its parts from below, each of a class.
pub(super) struct Column {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) parts: Vec<(&'static str, f64)>,
}

/// Columns beside each other, at one scale; `show` tells a value in words.
pub(super) fn columns(columns: &[Column], show: impl Fn(f64) -> String) -> Markup {
    let height = |c: &Column| c.parts.iter().map(|(_, value)| value).sum::<f64>();
    let most = columns.iter().map(height).fold(f64::MIN_POSITIVE, f64::max);
    let step = (WIDTH - LEFT) / columns.len().max(1) as f64;
    let width = (step * 0.8).clamp(0.5, 60.0);
    let every = columns.len().div_ceil(16).max(1);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {}", HEIGHT + BOTTOM)) role="img" {
            @for part in [0.0, 0.5, 1.0] {
                @let y = HEIGHT - (HEIGHT - 10.0) * part;
                line class="grid" x1=(LEFT) x2=(WIDTH) y1=(round(y)) y2=(round(y)) {}
                text class="axis" x=(LEFT - 8.0) y=(round(y + 4.0)) text-anchor="end" { (show(most * part)) }
            }
            @for (i, column) in columns.iter().enumerate() {
                @let x = LEFT + step * i as f64 + (step - width) / 2.0;
                g {
                    title { (column.title) }
                    @for (class, y, h) in stacked(column, most) {
                        rect class=(class) x=(round(x)) y=(round(y)) width=(round(width)) height=(round(h)) {}
                    }
                }
                @if i % every == 0 {
                    text class="axis" x=(round(x + width / 2.0)) y=(HEIGHT + 15.0) text-anchor="middle" { (column.name) }
                }
            }
        }
    }
}

/// The parts of a column: class, upper edge and height.
fn stacked(column: &Column, most: f64) -> Vec<(&'static str, f64, f64)> {
    let mut y = HEIGHT;
    let part = |(class, value): &(&'static str, f64)| {
        let h = value / most * (HEIGHT - 10.0);
        y -= h;
        (*class, y, h)
    };
    column.parts.iter().map(part).collect()
}

/// A mark on the line of the job's life.
pub(super) struct Mark {
    pub(super) at: f64,
    pub(super) class: &'static str,
    pub(super) title: String,
}

/// The job's life from `first` to `last`: a band for each time in which it has run, and marks.
pub(super) fn life((first, last): (f64, f64), runs: &[(f64, f64)], marks: &[Mark]) -> Markup {
    let span = (last - first).max(1e-3);
    let x = |at: f64| 5.0 + (at - first) / span * (WIDTH - 10.0);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} 60")) role="img" {
            @for (from, to) in runs {
                rect class="run" x=(round(x(*from))) y="22" width=(round((x(*to) - x(*from)).max(1.0))) height="16" {}
            }
            @for mark in marks {
                g {
                    title { (mark.title) }
                    line class=(mark.class) x1=(round(x(mark.at))) x2=(round(x(mark.at))) y1="12" y2="48" {}
                }
            }
        }
    }
}

/// As many digits as are seen.
fn round(value: f64) -> String {
    format!("{value:.2}")
}
