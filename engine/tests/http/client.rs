//! A plain HTTP/1.1 client on a blocking socket: small enough to see every byte, and able to misbehave.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Nothing on this machine takes longer; a hanging server fails the test instead of blocking it.
const TIMEOUT: Duration = Duration::from_mins(3);

/// A response whose head was read and whose body may still come.
pub(crate) struct Response {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    stream: BufReader<TcpStream>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    fn chunked(&self) -> bool {
        self.header("transfer-encoding") == Some("chunked")
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a line in time");
        line.trim_end().to_owned()
    }

    /// The next chunk of a chunked body; nothing at its end or when the server closed the connection.
    pub(crate) fn chunk(&mut self) -> Option<String> {
        let size = usize::from_str_radix(&self.line(), 16)
            .ok()
            .filter(|size| *size > 0)?;
        let mut bytes = vec![0; size + 2];
        self.stream.read_exact(&mut bytes).expect("a whole chunk");
        bytes.truncate(size);
        Some(String::from_utf8(bytes).expect("UTF-8"))
    }

    pub(crate) fn text(mut self) -> String {
        if self.chunked() {
            return std::iter::from_fn(|| self.chunk()).collect();
        }
        let length = self
            .header("content-length")
            .map_or(0, |length| length.parse().unwrap());
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).expect("a whole body");
        String::from_utf8(bytes).expect("UTF-8")
    }

    pub(crate) fn json(self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }

    /// The events of a stream, `[DONE]` as a string.
    pub(crate) fn events(self) -> Vec<Value> {
        let text = self.text();
        let data = text.split("\n\n").filter(|part| !part.is_empty());
        data.map(|part| {
            let data = part.strip_prefix("data: ").expect("every event is data");
            serde_json::from_str(data).unwrap_or_else(|_| data.into())
        })
        .collect()
    }
}

/// Sends these bytes and reads the head of what comes back.
pub(crate) fn raw(address: SocketAddr, bytes: &[u8]) -> Response {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(bytes).expect("the server reads");
    read_head(stream)
}

/// Reads the head of the next response.
pub(crate) fn read_head(stream: TcpStream) -> Response {
    let mut response = Response {
        status: 0,
        headers: Vec::new(),
        stream: BufReader::new(stream),
    };
    let status = response.line();
    response.status = status
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .unwrap_or(0);
    loop {
        let line = response.line();
        let Some((name, value)) = line.split_once(": ") else {
            return response;
        };
        response
            .headers
            .push((name.to_lowercase(), value.to_owned()));
    }
}

/// The bytes of a POST with a JSON body.
pub(crate) fn post_bytes(path: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    raw(address, &post_bytes(path, &body.to_string()))
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Response {
    raw(
        address,
        format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n").as_bytes(),
    )
}
