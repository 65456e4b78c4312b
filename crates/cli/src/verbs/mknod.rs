//! `offshoot mknod`: makes device nodes and FIFOs.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve_end};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileSystem, FileSystemMut, FileType, NewNode, SetAttr,
};

use crate::args::MknodArguments;
use crate::edit::{Caller, at_every_place, new_file};
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped};
use crate::permissions::ModeChange;
use crate::place::VolumePath;

pub(super) fn run(arguments: &MknodArguments, console: &Arc<Console>) -> Result {
    let node = node(arguments)?;
    let mode = arguments.mode.as_deref().map(ModeChange::parse).transpose();
    let mode = mode.map_err(VerbFailure::Usage)?;
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let places = vec![VolumePath::parse(&arguments.place)];
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let end = resolve_end(fs, path, LastLink::Keep)?;
        let (None, Some((dir, name)), false) = (end.file, end.place, end.must_be_directory) else {
            return Err(Error::posix(Errno::EXIST, Escaped(path).to_string()));
        };
        let new = new_file(fs, dir, 0o666, &caller)?;
        let make = || {
            let file = fs.mknod(EntryPlace { dir, name: &name }, node, &new)?;
            let Some(mode) = &mode else { return Ok(()) };
            let permissions = Some(mode.of(0o666, false, caller.umask));
            let set = SetAttr { permissions, ..SetAttr::default() };
            if permissions == Some(fs.attr(file)?.permissions) {
                return Ok(());
            }
            fs.set_attr(file, &set, caller.at)
        };
        make().map_err(|error| at_path(error, path))
    })
}

fn node(arguments: &MknodArguments) -> Result<NewNode> {
    let file_type = match arguments.node_type.as_str() {
        "b" => FileType::BlockDevice,
        "c" | "u" => FileType::CharDevice,
        "p" => FileType::Fifo,
        other => {
            return Err(VerbFailure::Usage(format!(
                "{other} is no type of a node: there are b, c, p"
            )));
        }
    };
    let rdev = match (file_type, arguments.major, arguments.minor) {
        (FileType::Fifo, None, None) => (0, 0),
        (FileType::Fifo, ..) => {
            return Err(VerbFailure::Usage("a FIFO has no numbers".into()));
        }
        (_, Some(major), Some(minor)) => (major, minor),
        _ => return Err(VerbFailure::Usage("a device has two numbers, MAJOR and MINOR".into())),
    };
    Ok(NewNode { file_type, rdev })
}
