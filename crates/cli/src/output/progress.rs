//! The progress line of a long verb on a terminal.
//!
//! ```text
//! / extracted 1.2 GiB of 4.0 GiB (30%), 17204 files, 310 MiB/s, 9s left
//! ```
//!
//! The total is known only some time after the start, or never. Until then, the line shows the
//! elapsed time. If the locale has no UTF-8, the line is ASCII.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use offshoot_transfer as transfer;

const BEGUN: &str = "{spinner} {prefix} {bytes}{files}, {bytes_per_sec}, in {elapsed}";
const EXPECTED: &str =
    "{spinner} {prefix} {bytes} of {total_bytes} ({percent}%){files}, {bytes_per_sec}, {eta} left";

/// The ASCII frames of the spinner.
const TURNS: &str = "|/-\\ ";

/// The progress line, shared by all threads.
#[derive(Clone)]
pub(crate) struct ProgressLine {
    bar: ProgressBar,
    files: Arc<AtomicU64>,
}

impl ProgressLine {
    /// A progress line that is not shown.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), files: Arc::default() }
    }

    /// A progress line on standard error; `verb` says what is done.
    pub(super) fn shown(verb: &'static str) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(10);
        let bar = ProgressBar::with_draw_target(None, target).with_prefix(verb);
        let progress = Self { bar, files: Arc::default() };
        progress.bar.set_style(progress.style(BEGUN));
        progress.bar.enable_steady_tick(Duration::from_millis(100));
        progress
    }

    fn style(&self, template: &str) -> ProgressStyle {
        let files = self.files.clone();
        let show = move |_: &ProgressState, line: &mut dyn std::fmt::Write| {
            // If the line cannot be written, it is not shown.
            let _ = match files.load(Ordering::Relaxed) {
                0 => Ok(()),
                1 => line.write_str(", 1 file"),
                many => write!(line, ", {many} files"),
            };
        };
        let style = ProgressStyle::with_template(template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        let style = style.with_key("files", show);
        if is_utf8() { style } else { style.tick_chars(TURNS) }
    }

    /// Sets the number of bytes that are done.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    /// Prints a line above the progress line.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Removes the progress line.
    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl transfer::TransferProgress for ProgressLine {
    fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    fn expect(&self, bytes: u64) {
        self.bar.set_length(bytes);
        self.bar.set_style(self.style(EXPECTED));
    }

    fn add_bytes(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn add_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether the locale has UTF-8, by the environment: the first variable that is set wins.
fn is_utf8() -> bool {
    let variables = ["LC_ALL", "LC_CTYPE", "LANG"].map(std::env::var_os);
    let locale = variables.into_iter().flatten().find(|value| !value.is_empty());
    locale.is_some_and(|locale| has_utf8(&locale.to_string_lossy()))
}

fn has_utf8(locale: &str) -> bool {
    let set = locale.split('@').next().and_then(|name| name.split_once('.'));
    set.is_some_and(|(_, set)| matches!(&*set.to_ascii_lowercase(), "utf-8" | "utf8"))
}

#[cfg(test)]
mod tests {
    use super::has_utf8;

    #[test]
    fn locales() {
        for (locale, expected) in [
            ("C", false),
            ("POSIX", false),
            ("C.UTF-8", true),
            ("de_DE.utf8", true),
            ("de_DE.UTF-8@euro", true),
            ("de_DE@euro", false),
            ("en_US.ISO-8859-1", false),
        ] {
            assert_eq!(has_utf8(locale), expected, "{locale}");
        }
    }
}
