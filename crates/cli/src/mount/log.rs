//! Where messages go while a volume is mounted: to standard error in the foreground, to a file, or
//! to the system log.
//!
//! A fault may repeat a thousand times a second. So at most [`MOST_LINES`] lines are written in
//! each [`WINDOW`], and then one line says how many were left out.

use std::fmt;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::events;
use crate::output::Console;

/// The most messages in a window.
const MOST_LINES: u32 = 20;

/// The time in which messages are counted.
const WINDOW: Duration = Duration::from_secs(10);

/// The socket of the system log.
const SYSLOG: &str = "/dev/log";

/// The priority of an error of a daemon (RFC 3164).
const ERROR: u32 = 3 * 8 + 3;

/// The priority of a daemon's message that needs no action.
const NOTE: u32 = 3 * 8 + 6;

/// Where messages go.
pub(super) struct Log {
    console: Arc<Console>,
    state: Mutex<MessageLog>,
}

struct MessageLog {
    /// The socket of the system log, if messages go there.
    system: Option<UnixDatagram>,
    began: Instant,
    lines: u32,
}

impl Log {
    /// A log that writes to standard error.
    pub(super) fn new(console: Arc<Console>) -> Self {
        let state = MessageLog { system: None, began: Instant::now(), lines: 0 };
        Self { console, state: Mutex::new(state) }
    }

    /// From now on, writes to the system log. If there is none, messages are lost.
    pub(super) fn use_system(&self) {
        let system = UnixDatagram::unbound().and_then(|socket| {
            socket.connect(SYSLOG)?;
            socket.set_nonblocking(true)?;
            events::use_system(socket.try_clone()?);
            Ok(socket)
        });
        self.state.lock().unwrap_or_else(PoisonError::into_inner).system = system.ok();
    }

    /// Writes an error, within the limit of the window.
    pub(super) fn line(&self, text: &dyn fmt::Display) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.began.elapsed() >= WINDOW {
            let left_out = state.lines.saturating_sub(MOST_LINES);
            (state.began, state.lines) = (Instant::now(), 0);
            if left_out > 0 {
                let text = format_args!("{left_out} more messages were left out");
                self.write(&state, ERROR, &text);
            }
        }
        state.lines += 1;
        if state.lines <= MOST_LINES {
            self.write(&state, ERROR, text);
        }
    }

    /// Writes a message that is not an error.
    pub(super) fn note(&self, text: &dyn fmt::Display) {
        self.write(&self.state.lock().unwrap_or_else(PoisonError::into_inner), NOTE, text);
    }

    fn write(&self, state: &MessageLog, priority: u32, text: &dyn fmt::Display) {
        match &state.system {
            Some(system) => {
                let text = text.to_string();
                let text = crate::output::message(&text);
                let pid = std::process::id();
                // A log that is full or gone must not keep a mount from being served.
                let _ = system.send(format!("<{priority}>offshoot[{pid}]: {text}").as_bytes());
            }
            None => self.console.error(text),
        }
    }
}
