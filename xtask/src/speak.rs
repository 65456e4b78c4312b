//! Runs a long command, passes its output on as it comes, and breaks long silences.
//!
//! A compiler may work for a minute on one crate and print nothing, and a person takes it for
//! stuck. So after 4 seconds of silence a line says what the command is doing.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The longest silence.
const SILENCE_MAX: Duration = Duration::from_secs(4);

/// The streams of a command.
#[derive(Clone, Copy)]
enum CommandStream {
    Output,
    Errors,
}

/// Runs `command`, passes on its output, and gives its standard output to `see` too. The lines that
/// break a silence say `what`.
pub(crate) fn run(
    command: &mut Command,
    what: &str,
    see: &mut dyn FnMut(&[u8]),
) -> io::Result<ExitStatus> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (sender, receiver) = channel();
    if let Some(output) = child.stdout.take() {
        forward(output, CommandStream::Output, sender.clone());
    }
    if let Some(errors) = child.stderr.take() {
        forward(errors, CommandStream::Errors, sender);
    }
    pass_on(&mut child, &receiver, what, see)?;
    child.wait()
}

/// Sends every piece as soon as it comes, so that the dots of tests appear one by one.
fn forward(
    mut from: impl Read + Send + 'static,
    stream: CommandStream,
    to: Sender<(CommandStream, Vec<u8>)>,
) {
    thread::spawn(move || {
        let mut buf = [0; 8192];
        loop {
            match from.read(&mut buf) {
                Ok(count @ 1..) if to.send((stream, buf[..count].to_vec())).is_ok() => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    });
}

fn pass_on(
    child: &mut Child,
    pieces: &Receiver<(CommandStream, Vec<u8>)>,
    what: &str,
    see: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    let started = Instant::now();
    let mut is_within_line = false;
    loop {
        match pieces.recv_timeout(SILENCE_MAX) {
            Ok((stream, piece)) => {
                is_within_line = piece.last() != Some(&b'\n');
                match stream {
                    CommandStream::Output => {
                        see(&piece);
                        write(&mut io::stdout(), &piece)?;
                    }
                    CommandStream::Errors => write(&mut io::stderr(), &piece)?,
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            // The command has ended, but a process that it started keeps the streams open.
            Err(RecvTimeoutError::Timeout) if child.try_wait()?.is_some() => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                let gap = if std::mem::take(&mut is_within_line) { "\n" } else { "" };
                let seconds = started.elapsed().as_secs();
                write(&mut io::stderr(), format!("{gap}   ... {what}, {seconds} s\n").as_bytes())?;
            }
        }
    }
}

fn write(to: &mut impl Write, piece: &[u8]) -> io::Result<()> {
    to.write_all(piece)?;
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_arrives_and_a_child_that_lives_on_holds_nothing_up() {
        let mut seen = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 30 & echo $!; echo two; exit 3"]);
        let status = run(&mut command, "waiting", &mut |piece| seen.extend_from_slice(piece));
        let seen = String::from_utf8(seen).expect("text");
        let (id, rest) = seen.split_once('\n').expect("two lines");
        // The shell has its own `kill`; the program is not on every machine.
        Command::new("sh").args(["-c", &format!("kill {id}")]).status().expect("sh starts");
        assert_eq!((status.expect("sh starts").code(), rest), (Some(3), "two\n"));
    }
}
