//! `offshoot mount` without arguments: lists the mounts.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::control::in_force;
use super::gate;
use super::table::{self, MountTableLine};
use crate::exit::Result;
use crate::output::{Escaped, json_name, write_line};

/// How long a mount has to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The state of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum MountState {
    /// A process serves it.
    Served,
    /// The process that served it has ended.
    Dead,
    /// The process that serves it does not answer.
    Silent,
    /// Another user mounted it, so it is not asked.
    Foreign,
}

#[derive(Serialize)]
struct ListedMount {
    volume: String,
    directory: String,
    read_only: bool,
    /// The subvolume, if the mount shows only one of those that are served.
    #[serde(skip_serializing_if = "Option::is_none")]
    subvolume: Option<u64>,
    state: MountState,
    /// The options of the first mount of the volume; empty if this user may not ask for them.
    options: Vec<String>,
    #[serde(skip)]
    line: MountTableLine,
}

/// Lists the mounts of this program.
pub(super) fn list(is_json: bool, out: &mut dyn Write) -> Result {
    let lines = table::lines()?.into_iter().filter(|line| line.is_ours);
    let mounts: Vec<ListedMount> = lines.map(ListedMount::new).collect();
    if is_json {
        return Ok(write_line(out, &mounts)?);
    }
    for mount in mounts {
        let escaped = |path: &Path| Escaped(path.as_os_str().as_bytes()).to_string();
        let ListedMount { line, .. } = &mount;
        let (volume, directory) = (escaped(&line.mounted.source), escaped(Path::new(&line.dir)));
        let mut words = vec![if mount.read_only { "ro" } else { "rw" }.to_owned()];
        words.extend(mount.subvolume.map(|id| format!("subvolid={id}")));
        let own = ["ro", "rw"];
        let is_of_place = |option: &String| {
            own.contains(&option.as_str())
                || mount.subvolume.is_some() && option.starts_with("subvol")
        };
        words.extend(mount.options.iter().filter(|option| !is_of_place(option)).cloned());
        let options = words.join(",");
        let state = match mount.state {
            MountState::Served => "",
            MountState::Dead => ": the program that served it has ended; `offshoot unmount` it",
            MountState::Silent => ": the program that serves it does not answer",
            MountState::Foreign => ": another user mounted it, so it is not asked",
        };
        writeln!(out, "{volume} on {directory} ({}){state}", Escaped(options.as_bytes()))?;
    }
    Ok(())
}

impl ListedMount {
    fn new(line: MountTableLine) -> Self {
        let (state, options) = look_at(&line);
        Self {
            volume: json_name(line.mounted.source.as_os_str().as_bytes()),
            directory: json_name(line.dir.as_bytes()),
            read_only: line.is_read_only || line.is_read_only_there,
            subvolume: gate::split(&line.root).map(|(id, _)| id),
            state,
            options,
            line,
        }
    }
}

/// The state of a mount, and its options. A thread asks, because a process that does not answer
/// would block this one.
fn look_at(line: &MountTableLine) -> (MountState, Vec<String>) {
    if !line.is_trusted() {
        return (MountState::Foreign, Vec::new());
    }
    if !line.is_on_top() {
        // Another mount hides it, so it cannot be asked.
        return (MountState::Served, Vec::new());
    }
    let (tell, told) = mpsc::channel();
    let dir = line.dir.clone();
    let look = move || {
        let is_dead = table::is_dead(Path::new(&dir));
        let served = if is_dead { None } else { in_force(Path::new(&dir), None).ok() };
        let options = served.map(|served| served.options).unwrap_or_default();
        // The receiver may have stopped waiting.
        let _ = tell.send((if is_dead { MountState::Dead } else { MountState::Served }, options));
    };
    if thread::Builder::new().spawn(look).is_err() {
        return (MountState::Silent, Vec::new());
    }
    told.recv_timeout(PATIENCE).unwrap_or((MountState::Silent, Vec::new()))
}
