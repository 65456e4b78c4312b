//! Starts the run of the program in the background, and waits until the mount can be used.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use clap::ValueEnum;

use super::Mounting;
use crate::exit::{ExitStatus, Result, VerbFailure};

/// Starts this program again to serve `mounting`, and returns when it serves.
pub(super) fn start(mounting: &Mounting<'_>) -> Result {
    let failed =
        |error| VerbFailure::Host("starting a process in the background".to_owned(), error);
    let mut child = again(mounting, "--in-background")
        .map_err(failed)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut ready = [0];
    let output = child.stdout.as_mut().expect("it has a pipe");
    if output.read_exact(&mut ready).is_ok() {
        return Ok(());
    }
    // The child printed its own error, unless it was killed.
    let status = child.wait().map_err(failed)?;
    if let Some(code) = status.code() {
        return Err(VerbFailure::Reported(ExitStatus::of_code(code)));
    }
    Err(failed(io::Error::other(status.to_string())))
}

/// This program again, with the same words, in the role that `flag` selects.
pub(super) fn again(mounting: &Mounting<'_>, flag: &str) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    // Under a name such as `mount.offshoot` the verb would be added twice.
    command.arg0("offshoot").args(words(mounting, flag));
    Ok(command)
}

/// The words of the same command line, with `flag`.
fn words(mounting: &Mounting<'_>, flag: &str) -> Vec<OsString> {
    let Mounting { arguments, volume, directory, options } = mounting;
    let mut words: Vec<OsString> = vec!["mount".into(), flag.into()];
    let open = &arguments.open;
    for device in &open.devices {
        words.extend(["--device".into(), device.into()]);
    }
    words.extend(open.degraded.then(|| "--degraded".into()));
    words.extend(open.ignore_log.then(|| "--ignore-log".into()));
    words.extend(open.rescue.words().into_iter().map(OsString::from));
    if let Some(offset) = open.layers.offset {
        words.extend(["--offset".into(), offset.to_string().into()]);
    }
    if let Some(format) = open.layers.image_format.and_then(|format| format.to_possible_value()) {
        words.extend(["--image-format".into(), format.get_name().into()]);
    }
    words.extend(open.layers.backing.then(|| "--backing".into()));
    if let Some(name) = &open.layers.image_snapshot {
        words.extend(["--image-snapshot".into(), name.into()]);
    }
    words.extend(arguments.sloppy.then(|| "-s".into()));
    words.extend(std::iter::repeat_n("-v".into(), arguments.verbose.into()));
    for option in options {
        words.extend(["-o".into(), option.into()]);
    }
    if let Some(log) = &arguments.log {
        words.extend(["--log".into(), log.into()]);
    }
    words.extend(["--".into(), volume.into(), directory.into()]);
    words
}
