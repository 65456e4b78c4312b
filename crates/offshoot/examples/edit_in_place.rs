//! Adds a line to a file in a volume: `edit_in_place disk.img /etc/hosts "10.0.0.1 home"`. A crash
//! leaves the old file or the new one.

use std::error::Error;
use std::{env, io};

use offshoot::OpenOptions;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [image, path, line] = &args[..] else {
        return Err("usage: edit_in_place IMAGE PATH LINE".into());
    };
    let volume = OpenOptions::new()
        .write(true)
        .on_warning(|what| eprintln!("warning: {what}"))
        .open(image)?;
    let mut text = volume.read(path)?;
    io::Write::write_all(&mut text, line.as_bytes())?;
    text.push(b'\n');
    let new = format!("{path}.new");
    volume.write(&new, text)?;
    let old = volume.metadata(path)?;
    let set = offshoot::SetAttr {
        permissions: Some(old.permissions),
        uid: Some(old.uid),
        gid: Some(old.gid),
        ..offshoot::SetAttr::default()
    };
    volume.set_attr(&new, &set)?;
    volume.sync_file(&new)?;
    volume.rename(&new, path)?;
    volume.sync()?;
    Ok(())
}
