//! What the engine and the mount do, as lines on standard error: the `tracing` events of the
//! libraries, if `-v` or the variable `OFFSHOOT_LOG` asks for them.
//!
//! A filter is a list of `LEVEL` and `TARGET=LEVEL`. A target stands for all targets below it, so
//! `fuse` is `fuse::mount` and `fuse::request`. Without a filter no subscriber is installed, and an
//! event costs one load of an atomic.
//!
//! While a mount is served in the background, lines go where its messages go: to the file of
//! `--log`, or to the system log. In a process that serves a mount, SIGUSR1 switches to all events
//! but those of single requests and runs of data, and back to what was asked for.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, OnceLock, PoisonError};

use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::exit::{Result, VerbFailure};
use crate::output::message;

/// The variable with the filter.
const VARIABLE: &str = "OFFSHOOT_LOG";

/// The facility of messages of daemons, in a priority of the system log (RFC 3164).
const DAEMON: u32 = 3 * 8;

/// The filter of the subscriber, if one is installed.
static FILTER: Mutex<Option<reload::Handle<Targets, Registry>>> = Mutex::new(None);

/// The filter that `-v` and the variable ask for, while SIGUSR1 has put another one in its place.
static ASKED_FOR: Mutex<Option<Targets>> = Mutex::new(None);

/// The socket of the system log, once lines go there.
static SYSTEM: OnceLock<UnixDatagram> = OnceLock::new();

/// Begins to write events, if `-v`, given `verbose` times, or the variable asks for them. The
/// variable overrides the level of `-v`.
pub(crate) fn begin(verbose: u8) -> Result {
    let level = match verbose {
        0 => LevelFilter::OFF,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let text = std::env::var_os(VARIABLE).unwrap_or_default();
    if verbose == 0 && text.is_empty() {
        return Ok(());
    }
    let text = text.to_string_lossy();
    let filter = parse(&text, Targets::new().with_default(level));
    write_to(filter.map_err(|what| VerbFailure::Usage(format!("{VARIABLE}: {what}")))?);
    Ok(())
}

/// Switches to all events but those of single requests and runs of data, or back to the events
/// that were asked for.
pub(crate) fn switch() {
    let mut asked_for = ASKED_FOR.lock().unwrap_or_else(PoisonError::into_inner);
    let filter = asked_for.take().unwrap_or_else(|| {
        *asked_for = Some(current().unwrap_or_default());
        Targets::new().with_default(LevelFilter::DEBUG)
    });
    write_to(filter);
}

/// The filter of the subscriber, if one is installed.
fn current() -> Option<Targets> {
    let known = FILTER.lock().unwrap_or_else(PoisonError::into_inner);
    known.as_ref().and_then(reload::Handle::clone_current)
}

/// From now on, writes to the system log over `socket`.
pub(crate) fn use_system(socket: UnixDatagram) {
    // It is called once.
    let _ = SYSTEM.set(socket);
}

/// Writes the events that pass `filter`, and no others.
fn write_to(filter: Targets) {
    let mut known = FILTER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = &*known {
        // Only a panic while another thread did this makes it fail.
        let _ = known.reload(filter);
        return;
    }
    let (filter, handle) = reload::Layer::new(filter);
    let lines = fmt::layer()
        .with_ansi(false)
        .with_timer(fmt::time::uptime())
        .with_thread_ids(true)
        .with_writer(EventWriters);
    // Nothing else installs a subscriber.
    if Registry::default().with(lines.with_filter(filter)).try_init().is_ok() {
        *known = Some(handle);
    }
}

/// Adds the filter in `text` to `filter`.
fn parse(text: &str, mut filter: Targets) -> Result<Targets, String> {
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (target, level) = match part.split_once('=') {
            Some((target, level)) => (Some(target.trim()), level.trim()),
            None => (None, part),
        };
        let level = level_of(level).ok_or_else(|| {
            format!("{part:?}: {level:?} is not off, error, warn, info, debug or trace")
        })?;
        filter = match target {
            None => filter.with_default(level),
            Some(target) if is_target(target) => filter.with_target(target, level),
            Some(target) => {
                let known: Vec<_> = targets().collect();
                let known = known.join(", ");
                return Err(format!("{part:?}: no events of {target:?}; there are {known}"));
            }
        };
    }
    Ok(filter)
}

fn level_of(word: &str) -> Option<LevelFilter> {
    // The type also takes numbers, and nothing for an error.
    let is_word = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphabetic());
    word.parse().ok().filter(|_| is_word)
}

fn targets() -> impl Iterator<Item = &'static str> {
    let engines = offshoot_btrfs::EVENT_TARGETS.iter().chain(offshoot_xfs::XFS_EVENT_TARGETS);
    engines.chain(offshoot_fuse::EVENT_TARGETS).copied()
}

/// Whether events have this target, or one below it.
fn is_target(target: &str) -> bool {
    let is_above = |below: &str| below.is_empty() || below.starts_with("::");
    targets().any(|known| known.strip_prefix(target).is_some_and(is_above))
}

/// Makes a stream for each event, by its level.
struct EventWriters;

impl MakeWriter<'_> for EventWriters {
    type Writer = EventWriter;

    fn make_writer(&self) -> EventWriter {
        EventWriter { priority: DAEMON + 7 }
    }

    fn make_writer_for(&self, event: &Metadata<'_>) -> EventWriter {
        // Warnings and errors have the priority that messages of the mount have.
        let severity = match *event.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        EventWriter { priority: DAEMON + severity }
    }
}

/// The stream of lines. Each write is a line.
struct EventWriter {
    /// The priority in the system log.
    priority: u32,
}

impl Write for EventWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        // Names of devices and damaged structures may have any bytes.
        let text = message(text.trim_end());
        match SYSTEM.get() {
            // As with messages, a log that is full or gone must not keep a mount from being served.
            Some(system) => {
                let pid = std::process::id();
                let line = format!("<{}>offshoot[{pid}]: {text}", self.priority);
                let _ = system.send(line.as_bytes());
            }
            // If standard error cannot be written, there is no place to report that.
            None => drop(io::stderr().write_all(format!("{text}\n").as_bytes())),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(text: &str, target: &str, level: Level) -> bool {
        parse(text, Targets::new()).expect("a filter").would_enable(target, &level)
    }

    #[test]
    fn filters_name_levels_and_targets() {
        assert!(passes("debug", "btrfs::commit", Level::DEBUG));
        assert!(!passes("debug", "btrfs::commit", Level::TRACE));
        let text = "warn, btrfs::commit=trace,fuse=debug";
        assert!(passes(text, "btrfs::commit", Level::TRACE));
        assert!(passes(text, "fuse::request", Level::DEBUG));
        assert!(!passes(text, "btrfs::log", Level::INFO));
        assert!(passes(text, "btrfs::log", Level::WARN));
        assert!(!passes("debug,btrfs::log=off", "btrfs::log", Level::ERROR));
        assert!(passes("xfs=warn", "xfs::report", Level::WARN));
    }

    #[test]
    fn what_is_no_filter_is_refused() {
        for text in ["debugg", "btrfs", "fuse=", "fuse=4", "2", "=debug", "fus=debug", "a=b=c"] {
            assert!(parse(text, Targets::new()).is_err(), "{text}");
        }
        let said = parse("btrfs::comit=trace", Targets::new()).expect_err("misspelt");
        assert!(said.contains("btrfs::commit, ") && said.contains("fuse::request"), "{said}");
    }
}
