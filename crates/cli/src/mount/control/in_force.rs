//! What the process that serves a mount reports about it to other runs of the program.

use std::ffi::OsStr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::client::mounted;
use crate::args::{InForceArguments, Verb};
use crate::exit::{Result, VerbFailure};
use crate::output::Console;

/// How a volume is served.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Served {
    /// The id of the subvolume that was asked for, or of the default one.
    pub(crate) subvolume: u64,
    /// The id of the subvolume that was mounted first.
    pub(crate) root: u64,
    /// The options of the first mount of the volume.
    pub(crate) options: Vec<String>,
}

/// Asks the process that serves the mount over `dir` for its options, and for the id of
/// `subvolume`.
///
/// # Errors
/// When the process cannot be asked, and when there is no such subvolume.
pub(in crate::mount) fn in_force(dir: &Path, subvolume: Option<&OsStr>) -> Result<Served> {
    let arguments = InForceArguments {
        directory: dir.to_path_buf(),
        subvolume: subvolume.map(OsStr::to_os_string),
        live: None,
    };
    let mut words = vec!["in-force".into(), dir.into()];
    if let Some(subvolume) = subvolume {
        words.extend(["--subvolume".into(), subvolume.to_os_string()]);
    }
    let client = mounted(&mut Verb::InForce(arguments))?.ok_or_else(|| {
        VerbFailure::Usage(format!("{}: no volume is mounted there with offshoot", dir.display()))
    })?;
    let mut said = Vec::new();
    client.run(&words, &mut said, &Console::default())?;
    Ok(serde_json::from_slice(&said)?)
}
